# SPDX-License-Identifier: Apache-2.0
"""The layers that the tutorial measures."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    tokens: int  # per rank
    hidden: int
    ffn: int
    experts: int
    top_k: int
    biases: bool = False
    routing: str = "uniform"

    @property
    def name(self):
        return "-".join((*self.model.replace(",", "").split(), str(self.tokens), self.routing.replace(":", "")))

    @property
    def without_fp8(self):
        """Returns why epx's experts in FP8 do not compute this layer, or nothing."""
        if self.biases:
            return "experts in FP8 have no biases"
        return "experts in FP8 have H and F in multiples of 128" if self.hidden % 128 or self.ffn % 128 else None

    @property
    def options(self):
        """Returns the options that ep_bench and the programs of examples/native share."""
        sizes = ("tokens", "hidden", "ffn", "experts", "top_k", "routing")
        options = [word for size in sizes for word in (f"--{size.replace('_', '-')}", str(getattr(self, size)))]
        return options + (["--biases"] if self.biases else [])


DEEPSEEK = Case("DeepSeek-V3", 4096, 7168, 2048, 256, 8)
MODELS = [
    *(dataclasses.replace(DEEPSEEK, tokens=tokens, routing=routing)
      for tokens in (4096, 256) for routing in ("uniform", "zipf:1.2")),
    Case("Qwen3-235B-A22B", 4096, 4096, 1536, 128, 8),
    Case("gpt-oss-120b", 4096, 2880, 2880, 128, 4, biases=True),
    Case("Mixtral-8x7B", 4096, 4096, 14336, 8, 2),
]
# The ranks of DeepSeek-V3 on so many GPUs have 64 experts each.
PROXY_MODEL, PROXY_RANKS = "DeepSeek-V3, 64 experts a GPU", 4
QUICK_CASES = [Case("quick", tokens, 256, 128, 8, 2, biases, routing)
               for tokens, biases, routing in ((64, False, "uniform"), (16, True, "zipf:1.2"))]
CHECK = Case("check", 192, 256, 192, 16, 4, biases=True, routing="zipf:1.2")
CHECKS = [CHECK, dataclasses.replace(CHECK, model="check-fp8", ffn=128, biases=False)]


def proxies(ranks):
    """Returns the cases that give a rank the experts and the tokens that it has of DeepSeek-V3 on PROXY_RANKS GPUs."""
    if ranks >= PROXY_RANKS:
        return []
    proxy = dataclasses.replace(DEEPSEEK, model=PROXY_MODEL, experts=DEEPSEEK.experts // PROXY_RANKS * ranks)
    return [dataclasses.replace(proxy, tokens=tokens, routing=routing)
            for tokens, routing in ((4096, "uniform"), (4096, "zipf:1.2"), (256, "uniform"))]


def all_cases(ranks):
    return [*proxies(ranks), *MODELS]
