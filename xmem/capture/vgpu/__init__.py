"""A virtual GPU: runs an unchanged job on a card that is not there, through the real PyTorch and its real allocator."""
