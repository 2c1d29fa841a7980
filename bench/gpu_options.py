# SPDX-License-Identifier: Apache-2.0
"""The options that bench/gpu_attention.py measures and docs/figures.py shows, by the mask of their rows (causal, full); several
at once are joined by a plus."""

OPTIONS = {
    "c": ("softcap", "alibi", "window 512", "sinks", "lse", "lengths", "documents", "dropout", "window 512+softcap"),
    "f": (
        "dropout",
        "lengths",
        "padding",
        "dense",
        "blocks",
        "bias shared",
        "bias",
        "bias padding",
        "dbias shared",
        "dbias",
        "softcap+padding",
        "dropout+padding",
        "dropout+dense",
        "bias shared+padding",
        "dropout+bias shared",
        "dbias shared+padding",
    ),
}
FLOAT32_OPTIONS = {
    "c": ("softcap", "alibi", "dropout"),
    "f": ("dropout", "padding", "dense", "blocks", "bias shared", "bias", "dbias shared", "dbias"),
}
# At head dims between those whose forward has a kernel for several options at once.
BETWEEN = ("softcap", "alibi", "dropout", "padding", "dense", "bias padding", "bias shared", "dropout+padding")
