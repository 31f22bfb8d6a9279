"""Releases with matrices in float8 blocks of 128 x 128: ``sync.quantize: fp8_block``."""
