"""Training scripts that run on the virtual card, chosen by name: `python jobs.py NAME`. Plain PyTorch only."""

from __future__ import annotations

import sys

import torch
import torchvision
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (t.view(batch, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 256), nn.Linear(256, 4096)
        self.blocks = nn.ModuleList(Block(256) for _ in range(4))
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def images(name: str, batch: int, optimizer: str, **arguments: object) -> None:
    model = getattr(torchvision.models, name)(weights=None).cuda()
    train(model, optimizer, arguments, lambda: (torch.randn(batch, 3, 96, 96), torch.zeros(batch, dtype=torch.long)))


def tokens(optimizer: str, *, checkpointing: bool = False, dtype: str = "", lengths: tuple[int, ...] = (128,)) -> None:
    model = Gpt(checkpointing).cuda()
    order = iter(lengths * 8)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        shape = 8, next(order)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    train(model, optimizer, {}, batch, dtype)


def train(
    model: nn.Module, optimizer: str, arguments: dict, batch: object, dtype: str = "", accumulate: int = 1
) -> None:
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.001, **arguments)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    while True:  # waits for a loss that never comes: the recorder ends it
        chosen.zero_grad()
        for _ in range(accumulate):
            inputs, targets = (tensor.cuda() for tensor in batch())
            with torch.autocast("cuda", dtype=getattr(torch, dtype or "bfloat16"), enabled=bool(dtype)):
                outputs = model(inputs)
                loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
            scaler.scale(loss).backward()
        scaler.step(chosen)
        scaler.update()
        if loss.item() < -1:
            break


def streams() -> None:
    side = torch.cuda.Stream()
    kept = []
    for size in range(1, 12):
        block = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            other = torch.empty(size << 19, dtype=torch.uint8, device="cuda")
            block.record_stream(side)
        del block
        kept.append(other)
    torch.cuda.empty_cache()
    del kept
    torch.empty(3 << 20, device="cuda")


def inference() -> None:
    model = Gpt().cuda().eval()
    cache: list[torch.Tensor] = []
    with torch.inference_mode():
        for length in range(8, 24):
            model(torch.zeros(4, length, dtype=torch.long, device="cuda"))
            cache.append(torch.empty(4, length, 256, device="cuda"))


def graph() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    inputs = torch.zeros(64, 512, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        model(inputs)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = model(inputs)
    for _ in range(3):
        captured.replay()
    torch.empty(1 << 22, device="cuda")
    del kept


JOBS = {
    "resnet18-sgd": lambda: images("resnet18", 32, "SGD", momentum=0.9),
    "vgg11-adam": lambda: images("vgg11", 16, "Adam"),
    "mobilenet-rmsprop": lambda: images("mobilenet_v3_small", 32, "RMSprop"),
    "convnext-adamw": lambda: images("convnext_tiny", 8, "AdamW"),
    "densenet-adagrad": lambda: images("densenet121", 8, "Adagrad"),
    "gpt-adam": lambda: tokens("Adam"),
    "gpt-adamw-bf16": lambda: tokens("AdamW", dtype="bfloat16"),
    "gpt-sgd-fp16": lambda: tokens("SGD", dtype="float16"),
    "gpt-checkpointing": lambda: tokens("AdamW", checkpointing=True),
    "gpt-lengths": lambda: tokens("AdamW", lengths=(128, 96, 160, 64)),
    "streams": streams,
    "inference": inference,
    "graph": graph,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]]()
