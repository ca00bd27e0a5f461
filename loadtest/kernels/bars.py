"""What others reach with the same work on one NVIDIA H200: the bars printed beside our rows.

Measured 2026-11-20 (driver 580.159, CUDA 13.0, torch 2.11, vLLM 0.26, FlashInfer 0.7.2), microseconds a call: bf16,
head size 128, blocks of 16 tokens in random order for the first four columns, contiguous tensors for the
last three.
CUDA-graph replays, medians; what a peer plans once a step is not counted.  None: it does not do that.
"""

from __future__ import annotations

# paged: FA3 as vLLM ships it, FlashInfer on tensor cores (fa2), FlashInfer on CUDA cores, vLLM's Triton kernel;
# contiguous: FA3, cuDNN SDPA, torch's flash SDPA
DECODE_COLUMNS = ("fa3", "flashinfer_tc", "flashinfer_cc", "vllm_triton", "fa3_flat", "cudnn_flat", "torch_flat")
# (query heads, KV heads, batch, context): microseconds
DECODE: dict[tuple[int, int, int, int], tuple[float, ...]] = {
    (32, 8, 1, 512): (11.0, 8.2, 9.5, 6.8, 10.9, 7.6, 9.0),
    (32, 8, 8, 512): (12.9, 14.3, 13.2, 16.9, 12.9, 9.6, 13.2),
    (32, 8, 32, 512): (25.2, 24.3, 32.2, 34.0, 24.2, 20.2, 30.2),
    (32, 8, 128, 512): (80.8, 77.6, 96.6, 80.1, 80.5, 67.8, 115.9),
    (32, 8, 256, 512): (151.4, 142.4, 186.3, 155.7, 152.6, 128.6, 223.1),
    (32, 8, 1, 2048): (12.2, 11.0, 12.1, 15.8, 12.2, 9.0, 13.1),
    (32, 8, 8, 2048): (25.3, 27.5, 31.0, 38.3, 24.9, 22.6, 24.9),
    (32, 8, 32, 2048): (72.9, 69.1, 101.6, 122.1, 71.1, 65.0, 108.2),
    (32, 8, 128, 2048): (265.4, 258.5, 381.8, 295.4, 256.2, 245.8, 448.5),
    (32, 8, 256, 2048): (518.4, 503.4, 752.5, 578.9, 504.3, 481.1, 892.2),
    (32, 8, 1, 8192): (17.5, 20.9, 22.5, 45.9, 16.5, 15.3, 22.7),
    (32, 8, 8, 8192): (72.7, 72.7, 101.3, 122.1, 70.2, 67.5, 70.4),
    (32, 8, 32, 8192): (252.3, 250.0, 383.8, 470.6, 251.0, 244.9, 417.0),
    (32, 8, 128, 8192): (979.2, 978.4, 1514.2, 1142.5, 966.9, 967.3, 1767.0),
    (32, 8, 256, 8192): (1961.9, 1940.9, 3081.5, 2255.6, 1940.5, 1919.3, 3851.6),
    (32, 8, 1, 32768): (42.1, 42.3, 65.6, 166.1, 42.2, 37.9, 47.0),
    (32, 8, 8, 32768): (254.9, 253.6, 374.7, 471.9, 252.0, 245.0, 252.7),
    (32, 8, 32, 32768): (979.5, 971.0, 1523.2, 1841.0, 969.8, 960.2, 1750.6),
    (32, 8, 128, 32768): (3847.6, 3866.8, 6482.4, 5254.1, 3829.8, 3857.8, 7333.6),
    (32, 8, 256, 32768): (7747.4, 7729.4, 12639.1, 8932.8, 7741.4, 7662.0, 14175.8),
    (64, 8, 1, 2048): (12.1, 11.0, 14.4, 16.3, 12.1, 9.1, 13.4),
    (64, 8, 1, 32768): (41.7, 42.5, 90.9, 168.8, 41.1, 38.0, 47.0),
    (64, 8, 32, 2048): (73.6, 69.4, 174.7, 117.4, 71.7, 65.3, 107.8),
    (64, 8, 32, 8192): (253.8, 249.2, 670.8, 463.1, 250.5, 245.4, 433.8),
    (64, 8, 128, 8192): (981.3, 982.9, 2644.7, 1189.5, 969.4, 966.7, 1787.3),
    (40, 40, 1, 2048): (19.1, 21.4, 18.6, 23.8, 18.4, 17.0, 20.8),
    (40, 40, 32, 2048): (319.2, 314.7, 315.0, 399.9, 312.3, 301.7, 559.7),
    (40, 40, 32, 8192): (1212.8, 1215.2, 1225.5, 1586.9, 1207.9, 1194.9, 2207.7),
    (40, 40, 128, 2048): (1241.9, 1234.1, 1206.4, 1423.5, 1225.2, 1176.9, 2257.4),
}

# paged: FA3, FlashInfer fa3, FlashInfer fa2, vLLM's Triton kernel; contiguous: FA3, cuDNN SDPA, torch's flash SDPA
PREFILL_COLUMNS = ("fa3", "flashinfer_fa3", "flashinfer_fa2", "vllm_triton", "fa3_flat", "cudnn_flat", "torch_flat")
# (query heads, KV heads, batch, queries, tokens cached before them): microseconds
PREFILL: dict[tuple[int, int, int, int, int], tuple[float | None, ...]] = {
    (32, 8, 1, 512, 0): (15.3, 13.6, 62.3, 51.4, 15.3, 13.0, 20.0),
    (32, 8, 32, 512, 0): (239.0, 267.4, 281.3, 1155.4, 231.2, 183.9, 350.8),
    (32, 8, 1, 2048, 0): (73.7, 89.5, 160.3, 538.7, 69.3, 84.2, 163.7),
    (32, 8, 8, 2048, 0): (583.0, 628.5, 866.7, 3873.4, 544.1, 539.8, 923.5),
    (32, 8, 1, 8192, 0): (957.1, 1093.1, 1677.6, 7527.4, 903.1, 1004.8, 1722.6),
    (32, 8, 2, 8192, 0): (1922.1, 2156.4, 3242.4, 14757.9, 1787.4, 1982.1, 3316.2),
    (32, 8, 1, 512, 8192): (126.3, 126.9, 260.1, 1033.0, 115.9, None, None),
    (32, 8, 8, 512, 8192): (987.0, 1110.9, 1643.5, 7758.5, 931.0, None, None),
    (64, 8, 8, 2048, 0): (1155.9, 1261.9, 1694.0, 7182.7, 1093.7, 1114.4, 1816.9),
    (64, 8, 1, 8192, 0): (1921.3, 2157.8, 3171.8, 13833.3, 1794.7, 1991.4, 3283.4),
    (64, 8, 1, 512, 8192): (230.3, 249.4, 421.4, 1988.0, 227.2, None, None),
    (40, 40, 8, 2048, 0): (771.2, 819.2, 1133.2, 4895.2, 732.6, 680.9, 1169.0),
    (40, 40, 1, 512, 8192): (234.4, 249.0, 425.0, 1494.8, 213.9, None, None),
}
PAGED = 4  # so many of the columns read a paged cache


def best_paged(row: tuple[float | None, ...] | None) -> float | None:
    """Microseconds of the fastest peer that reads a paged cache."""
    return min((time for time in (row or ())[:PAGED] if time is not None), default=None)


def best_flat(row: tuple[float | None, ...] | None) -> float | None:
    """Microseconds of the fastest peer that reads contiguous tensors."""
    return min((time for time in (row or ())[PAGED:] if time is not None), default=None)
