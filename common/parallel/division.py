"""Divide a Hugging Face model among ranks, by the plan that the model brings (`tp_plan`).

    style in the plan       what a rank has
    colwise                 a part of the rows of the weight, so a part of the outputs: its heads,
                            or its part of the MLP
    rowwise                 the columns for its part of the inputs. Its product is one summand of
                            the output, and the ranks add their summands (all-reduce)
    colwise_gather_output   of the LM head: a part of the vocabulary. The ranks join their logits
    moe_tp_experts          a part of each expert. The ranks add the outputs of the experts

    x -> norm -> q, k, v of its heads -> attention -> o -> SUM, + x
      -> norm -> gate, up of its part -> down -> SUM, + x                   two sums in each layer

A rank frees what it does not need. The modules keep their names, and a part is an ordinary
`nn.Linear`, so that the passes of `common/fast/passes` find it (Megatron-LM: Shoeybi et al.,
2019).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..fast import subclass
from ..hf.support import UnsupportedModelError
from .ranks import Joined, Ranks, Summed

ROWS, COLUMNS, JOINED, EXPERTS = "colwise", "rowwise", "colwise_gather_output", "moe_tp_experts"
PACKED_ROWS = "packed_colwise"  # of experts: the parts of gate and up are one weight
OTHER_NAMES = {"colwise_rep": JOINED}  # older versions of transformers
# Each rank has the whole module. The embedding could be divided too. But it is often tied to the
# head, and a lookup reads few of its rows.
WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise")
NUMBER = re.compile(r"\.\d+(?=\.|$)")
PROMPT = (1, 5, 2, 9, 4, 3, 8, 6)  # of the comparison with the whole model

MIXINS: dict[str, Any] = {COLUMNS: Summed, JOINED: Joined, EXPERTS: Summed}


class Division:
    """How one model is divided: first `cut`, then the passes, then `connect`, then `check`."""

    def __init__(self, name: str, model: PreTrainedModel, size: int) -> None:
        """Raises `UnsupportedModelError` if a model cannot be divided among `size` ranks.

        name: of the model, for the error.
        """
        self.name, self.model, self.size = name, model, size
        self.styles: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if (style := self._style_of(name)) is not None:
                self.styles[module] = style
        if COLUMNS not in self.styles.values():
            raise self._refusal("a structure for which transformers has no usable tp_plan")
        self._require_divisible()
        self.expected = self._logits()

    def cut(self, rank: int) -> None:
        """Keep the part of one rank, and free the rest of the weights."""
        for module, style in self.styles.items():
            if style == EXPERTS:
                self._cut_experts(module, rank)
            else:
                self._cut_linear(module, style, rank)

    def connect(self, ranks: Ranks) -> None:
        """Let the modules add or join the results of all ranks.

        Weights must be packed before: the mixin is outside the mixin of the packed weight.
        """
        for module, style in self.styles.items():
            if style in MIXINS:
                module.__dict__["ranks"] = ranks
                original: Any = type(module)
                module.__class__ = subclass(MIXINS[style], original)

    def check(self) -> None:
        """Compare the logits of all ranks together with those of the whole model.

        Raises `UnsupportedModelError` if they differ by more than rounding.
        """
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            error = (self._logits() - self.expected).abs().max() / self.expected.abs().max()
        except (RuntimeError, ValueError, TypeError) as cause:  # shapes that do not fit
            raise self._refusal(
                f"layers that tp_plan does not divide correctly ({cause})"
            ) from cause
        if not error < tolerance:
            raise self._refusal(f"other logits when it is divided: they are off by {error:.1%}")

    def _style_of(self, name: str) -> str | None:
        """Return the style of a module; None if each rank has the whole module."""
        plan: dict[str, str] = getattr(self.model, "tp_plan", None) or {}
        pattern = NUMBER.sub(".*", name)
        found = [s for key, s in plan.items() if f".{pattern}".endswith(f".{key}")]
        if not found or found[0] in WHOLE:
            return None
        style, is_head = OTHER_NAMES.get(found[0], found[0]), self._is_head(name)
        if style == JOINED and is_head:
            return JOINED if self._head_is_divisible() else None
        if style not in (ROWS, COLUMNS, EXPERTS) or is_head:
            raise self._refusal(f"a tp_plan with {style!r} for {pattern}")
        return style

    def _is_head(self, name: str) -> bool:
        return self.model.get_submodule(name) is self.model.get_output_embeddings()

    def _head_is_divisible(self) -> bool:
        head: Any = self.model.get_output_embeddings()
        return bool(head.weight.shape[0] % self.size == 0)

    def _require_divisible(self) -> None:
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        counts = {
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "num_attention_heads": heads,
        }
        module: Any
        for module, style in self.styles.items():
            if style == EXPERTS:
                counts["the inputs of an expert's down_proj"] = module.down_proj.shape[-1]
            elif style == COLUMNS:
                counts["the inputs of a rowwise layer"] = module.in_features
            elif style == ROWS:
                counts["the outputs of a colwise layer"] = module.out_features
            for name, count in counts.items():
                if count % self.size != 0:
                    raise UnsupportedModelError(
                        f"tensor_parallel_size must divide {name}, which is {count} in "
                        f"{self.name}, got {self.size}"
                    )

    def _cut_linear(self, linear: Any, style: str, rank: int) -> None:
        dim = 1 if style == COLUMNS else 0
        embedding: Any = self.model.get_input_embeddings()
        if linear.weight is embedding.weight:  # all of it stays in memory
            view = linear.weight.detach().chunk(self.size)[rank]
            linear.weight = nn.Parameter(view, requires_grad=False)
        else:
            linear.weight = _part(linear.weight, dim, self.size, rank)
        linear.out_features, linear.in_features = linear.weight.shape
        if linear.bias is not None and style != COLUMNS:
            linear.bias = _part(linear.bias, 0, self.size, rank)
        elif linear.bias is not None and rank > 0:
            linear.bias = None  # of a sum, so that it is added once

    def _cut_experts(self, experts: Any, rank: int) -> None:
        """Keep a part of each expert. gate_up_proj: [E, 2 * I, H]; down_proj: [E, H, I]."""
        experts.down_proj = _part(experts.down_proj, 2, self.size, rank)
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        whole = torch.cat([half.chunk(self.size, 1)[rank] for half in (gate, up)], dim=1)
        experts.gate_up_proj = nn.Parameter(whole.detach(), requires_grad=False)

    @torch.inference_mode()
    def _logits(self) -> torch.Tensor:
        """Return logits [1, tokens, V] of a short prompt."""
        prompt = torch.tensor([PROMPT], device=self.model.device)
        logits: torch.Tensor = self.model(input_ids=prompt, use_cache=False).logits
        return logits.float()

    def _refusal(self, feature: str) -> UnsupportedModelError:
        kind = self.model.config.model_type
        return UnsupportedModelError(
            f"{self.name} ({kind}) does not support tensor_parallel_size={self.size}: "
            f"it has {feature}"
        )


def _part(parameter: torch.Tensor, dim: int, size: int, rank: int) -> nn.Parameter:
    """Return one of `size` equal parts of a parameter, in memory of its own."""
    part = parameter.detach().chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=False)
