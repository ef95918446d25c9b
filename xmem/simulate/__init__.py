"""The allocators and the replay of requests through them: the only loop over single events."""
