"""Releases whose matrices are float8 in blocks of 128 x 128: ``sync.quantize: fp8_block``."""
