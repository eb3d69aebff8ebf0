"""The PyTorch side: targets, drafters, training, calibration, recording, live drafting.

Needs the extra ``[drafter]`` (torch, gguf, tokenizers, safetensors). Nothing outside this package imports it, so
everything that replays banks runs without torch.
"""
