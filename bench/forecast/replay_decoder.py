"""One micro-batch of the shipped decoders, operator by operator: the tensors that each makes, and those it frees.

After transformers' modeling_llama.py and torch's derivatives.yaml. An operator's backward holds what its forward saved,
the gradient that it is given and those that it returns; when it is done, the saved tensors are freed. Autograd runs the
backward of the latest operator first, and adds a parameter's gradient as soon as it has made it
(torch/csrc/autograd/engine.cpp).

With h = hidden size, q = heads x head size, k the same of the key-value heads and i = the MLP's width, a block saves
per token: two norms, each with its input (fp32), what it normalized and what it returns, 6h in all; queries, keys,
values and the output of attention, 2q + 2k, with one log-sum per head (fp32); the MLP's gate, its SiLU, the other
branch and their product, 4i; and one root mean square per norm (fp32). An element has 4 bytes in fp32. In bf16 it has
2, except in the norms' inputs (8h) and the scalars. Autocast keeps both tensors of a norm in fp32 and casts what it
returns once for each of the five products that read it: 16h + 10h bytes.

Attention is a fused kernel, whose own work space is not seen; the math kernel would keep the scores too. Gradients of
one tensor are added out of place, as under a dispatch mode: without one, a tensor of tokens x hidden less is alive for
a moment.
"""

from __future__ import annotations

from bench.forecast.live import Live, Widths
from bench.forecast.replay_frameworks import Framework, new_gradient
from bench.plan.models import LlamaSize
from bench.workload.layout import ROOT, Layout


class Decoder:
    """Replays forward and backward of one micro-batch."""

    def __init__(
        self,
        live: Live,
        framework: Framework,
        layout: Layout,
        size: LlamaSize,
        *,
        samples: int,
        sequence_length: int,
        widths: Widths,
        saved_bytes: int | None,
        checkpointed: bool = False,
        repeated: bool = False,
    ) -> None:
        """``saved_bytes``: what autograd saves before the loss, if it is known and not to be counted.

        ``checkpointed``: blocks keep their input alone (``torch.utils.checkpoint``, not reentrant). ``repeated``: keys
        and values are repeated for every head of the queries before attention.
        """
        self._live, self._framework, self._layout, self._size = live, framework, layout, size
        self._widths = widths
        self._tokens, self._sequence = samples * sequence_length, sequence_length
        assert not (checkpointed and saved_bytes is not None), "what is recomputed has to be counted"
        self._given = saved_bytes
        self._checkpointed, self._repeated = checkpointed, repeated
        names = [p.name.removeprefix("model.").removesuffix(".weight") for p in layout.parameters]
        self._index = {name: index for index, name in enumerate(names)}
        self._casts = widths.residual != widths.product
        """Whether autocast casts the weights."""
        if size.tied:
            self._index["lm_head"] = self._index["embed_tokens"]

        self._drop, self._release = live.drop, live.forget

    def _save(self, name: str, per_token: int) -> None:
        """A tensor that autograd saves."""
        if self._given is None:
            self._live.make(name, "activations", per_token * self._tokens)

    def _make(self, name: str, per_token: int) -> None:
        """A tensor of work space."""
        self._live.make(name, "temporaries", per_token * self._tokens)

    def _replace(self, name: str, per_token: int, *old: str) -> None:
        """A tensor that is computed from ``old`` ones, lives beside them until they are freed, and is then ``name``."""
        self._make("replacement", per_token)
        self._drop(*old)
        self._live.rename("replacement", name, "temporaries")

    def forward(self) -> None:
        """Up to the log-softmax of the loss."""
        size, live, widths = self._size, self._live, self._widths
        live.moment = "forward"
        self._framework.enter(ROOT)
        self._use("embed_tokens", is_matrix=False)
        # cos and sin of every position
        angles = 2 * self._sequence * size.head_size * widths.residual
        live.make("angles", "activations", 0 if self._given is not None else angles)
        norms = [*(f"layers.{block}.input_layernorm" for block in range(size.num_layers)), "norm"]
        if not self._checkpointed:
            self._residual(norms[0])
        for block in range(size.num_layers):
            self._framework.enter(block + 1)
            if self._checkpointed:
                self._keep_input(f"layers.{block}")
            else:
                self._forward_of_block(f"layers.{block}", before=norms[block + 1])
            self._framework.leave(block + 1)
        if self._checkpointed:
            self._residual("norm")
        self._forward_of_norm("norm", into=1)
        self._use("lm_head")
        vocabulary = size.vocab_size
        self._make("logits", widths.product * vocabulary)
        live.forget("residual")
        self._framework.leave(ROOT)
        live.moment = "loss"
        live.make("targets", "activations", 8 * self._tokens * (self._given is None))  # int64
        if widths.product < 4:
            self._make("fp32 logits", 4 * vocabulary)
        self._make("log-softmax", 4 * vocabulary)
        live.forget("logits", "fp32 logits")
        if self._checkpointed:  # autocast ends, and frees the casts that autograd has not saved
            live.forget(*(f"{name} cast" for name in self._index if name.startswith("layers.")))

    def _keep_input(self, block: str) -> None:
        """A checkpointed block's forward, of which only its input and autocast's casts stay.

        What is alive within it is not replayed: the same is alive in the backward, beside the gradient.
        """
        self._save(f"{block} kept", self._widths.residual * self._size.hidden_size)
        if self._casts:
            for name in (name for name in self._index if name.startswith(f"{block}.") and name.endswith("_proj")):
                self._use(name)

    def _compute_again(self, block: str) -> None:
        """A checkpointed block's forward in its backward, up to the last tensor that is saved.

        The first norm saves the block's input as it is in fp32, and a copy of it otherwise.
        """
        norm = f"{block}.input_layernorm"
        if self._widths.residual == 4:
            self._live.rename(f"{block} kept", f"{norm} input", "activations")
        self._forward_of_block(block, before="")
        self._release("residual")

    def _residual(self, norm: str) -> None:
        """The residual stream before a norm: saved by the norm in fp32, by nothing in bf16."""
        if self._widths.residual == 4:
            self._save(f"{norm} input", 4 * self._size.hidden_size)
        else:
            self._make("new residual", self._widths.residual * self._size.hidden_size)
            self._release("residual")
            self._live.rename("new residual", "residual", "temporaries")

    def _use(self, parameter: str, *, is_matrix: bool = True) -> None:
        """A parameter is used; autocast casts the weights of products, and autograd saves the copies."""
        index = self._index[parameter]
        self._framework.use(index)
        if self._casts and is_matrix:
            size = self._widths.product * self._framework.numel(index)
            self._live.make(f"{parameter} cast", "parameters_transient", size)
        self._framework.used(index)

    def _forward_of_block(self, block: str, *, before: str) -> None:
        """``before``: the norm that the block's output goes into; empty if that output is not computed."""
        size, width = self._size, self._widths.product
        heads, kv = size.num_heads * size.head_size, size.num_kv_heads * size.head_size
        if self._given is not None:
            self._live.make(f"{block} given", "activations", self._given // size.num_layers)
        self._forward_of_norm(f"{block}.input_layernorm", into=3)
        for name in "qkv":
            self._use(f"{block}.self_attn.{name}_proj")
        self._save(f"{block} query", width * heads)
        for name in ("key", "value"):
            self._save(f"{block} {name}", width * (heads if self._repeated else kv))
        self._save(f"{block} attention", width * heads)
        self._save(f"{block} log-sums", 4 * size.num_heads)
        self._use(f"{block}.self_attn.o_proj")
        self._residual(f"{block}.post_attention_layernorm")
        self._forward_of_norm(f"{block}.post_attention_layernorm", into=2)
        inner = width * size.intermediate_size
        self._use(f"{block}.mlp.gate_proj")
        self._save(f"{block} gate", inner)
        self._save(f"{block} activated", inner)
        self._use(f"{block}.mlp.up_proj")
        self._save(f"{block} up", inner)
        self._save(f"{block} product", inner)
        self._use(f"{block}.mlp.down_proj")
        if before:
            self._residual(before)

    def _forward_of_norm(self, norm: str, into: int) -> None:
        """It saves its input and the root mean square in fp32, what it normalized, and what it returns.

        Under autocast what it returns is not saved, but its casts for the products that it goes ``into``.
        """
        hidden, widths = self._size.hidden_size, self._widths
        if widths.residual < 4:
            self._save(f"{norm} input", 4 * hidden)
        self._save(f"{norm} root", 4)
        self._save(f"{norm} normalized", widths.norm * hidden)
        self._use(norm, is_matrix=False)
        if self._casts:
            for number in range(into):
                self._save(f"{norm} output {number}", widths.product * hidden)
        else:
            self._save(f"{norm} output 0", widths.product * hidden)

    def backward(self) -> None:
        """From the loss to the embedding's gradient."""
        size, live = self._size, self._live
        live.moment = "loss"
        self._make("gradient of nll", 4 * size.vocab_size)
        self._make("logits'", 4 * size.vocab_size)
        self._drop("gradient of nll", "log-softmax", "targets")
        if self._widths.product < 4:
            self._replace("logits'", self._widths.product * size.vocab_size, "logits'")
        self._framework.reach(ROOT)
        live.moment = "head"
        self._backward_of_product("lm_head", "logits'", saved=["norm output 0"], into="sum", width=size.hidden_size)
        self._backward_of_norm("norm", residual=None)
        for block in reversed(range(size.num_layers)):
            live.moment = "block"
            self._framework.reach(block + 1)
            if self._checkpointed:
                self._compute_again(f"layers.{block}")
            self._backward_of_block(f"layers.{block}")
            self._release(f"layers.{block} kept")
            live.moment = "reduce"
            self._framework.finish(block + 1)
        live.moment = "root"
        self._drop("angles")
        self._backward_of_embedding()
        self._framework.finish(ROOT)

    def _backward_of_block(self, block: str) -> None:
        """``stream`` is the gradient of the residual stream: first that of the block's output, then of its input."""
        size, width = self._size, self._widths.product
        hidden, heads, kv = size.hidden_size, size.num_heads * size.head_size, size.num_kv_heads * size.head_size
        inner, mlp, attention = width * size.intermediate_size, f"{block}.mlp", f"{block}.self_attn"
        norm = f"{block}.post_attention_layernorm"
        self._cast_stream()
        self._backward_of_product(
            f"{mlp}.down_proj", "branch", saved=[f"{block} product"], into="product'", width=size.intermediate_size
        )
        self._make("up'", inner)
        self._make("activated'", inner)
        self._drop("product'")
        self._release(f"{block} activated", f"{block} up")
        self._backward_of_product(f"{mlp}.up_proj", "up'", saved=[f"{norm} output 1"], into="sum", width=hidden)
        self._make("gate'", inner)
        self._drop("activated'")
        self._release(f"{block} gate")
        self._backward_of_product(f"{mlp}.gate_proj", "gate'", saved=[f"{norm} output 0"], into="other", width=hidden)
        self._add_up()
        self._backward_of_norm(norm, residual="stream")
        norm = f"{block}.input_layernorm"
        self._cast_stream()
        self._backward_of_product(f"{attention}.o_proj", "branch", saved=[], into="attention'", width=heads)
        for name, numel in (("query", heads), ("key", kv), ("value", kv)):
            self._make(f"{name}'", width * numel)
        self._drop("attention'")
        self._release(*(f"{block} {name}" for name in ("query", "key", "value", "attention", "log-sums")))
        for numel in (kv, heads):
            # The halves that were rotated, each padded with zeros, and their sum (modeling_llama.py:rotate_half).
            self._make("rotation", 3 * self._widths.residual * numel)
            self._drop("rotation")
        for number, (name, into) in enumerate((("value", "sum"), ("key", "other"), ("query", "other"))):
            output = f"{norm} output {2 - number}"
            self._backward_of_product(
                f"{attention}.{name[0]}_proj", f"{name}'", saved=[output], into=into, width=hidden
            )
            if number:
                self._add_up()
        self._backward_of_norm(norm, residual="stream")
        self._release(f"{block} given")

    def _cast_stream(self) -> None:
        """A branch's gradient is that of the stream; autocast casts it."""
        self._make("branch", self._casts * self._widths.product * self._size.hidden_size)

    def _backward_of_product(self, parameter: str, gradient: str, *, saved: list[str], into: str, width: int) -> None:
        """The gradients of input and weight at once; then that of the weight, under autocast cast to fp32, is added."""
        widths, index = self._widths, self._index[parameter]
        self._framework.use_again(index)
        numel, new = self._framework.numel(index), new_gradient(index)
        self._make(into, widths.product * width)
        cast = f"{new} of the cast"
        self._live.make(cast if self._casts else new, "gradients_transient", widths.product * numel)
        self._drop(gradient)
        self._release(*saved)
        if self._casts:
            self._live.make(new, "gradients_transient", 4 * numel)
            self._drop(cast, f"{parameter} cast")
        if not (parameter == "lm_head" and self._size.tied):
            self._framework.gradient(index)
        self._framework.used_again(index)
        if self._casts and into in ("sum", "other"):  # the gradient of what a norm returned
            self._replace(into, widths.norm * width, into)

    def _add_up(self) -> None:
        """Two gradients of one tensor are added."""
        self._replace("sum", self._widths.norm * self._size.hidden_size, "sum", "other")

    def _backward_of_norm(self, norm: str, residual: str | None) -> None:
        """From ``sum``, the gradient of what it returned, to ``stream``, that of its input added to the residual's."""
        hidden, widths, index = self._size.hidden_size, self._widths, self._index[norm]
        in_fp32 = widths.residual == 4
        self._framework.use_again(index)
        self._make("weighted'", widths.norm * hidden)  # the weight's gradient, before it is summed over tokens
        self._make("normalized'", widths.norm * hidden)
        self._drop("sum", "weighted'")
        self._release(f"{norm} normalized", f"{norm} output 0")
        self._live.make(new_gradient(index), "gradients_transient", (4 if in_fp32 else 2) * hidden)
        self._framework.gradient(index)
        if not in_fp32:
            self._replace("normalized'", 4 * hidden, "normalized'")
        self._make("scaled'", 4 * hidden)
        self._make("root'", 4 * hidden)
        self._drop("normalized'", "root'")
        if in_fp32 and residual:  # the norm's input is the residual itself, so their gradients are added at once
            self._replace("scaled'", 4 * hidden, "scaled'", residual)
        # The gradient of the square, grad * (2 * input ** 1), beside that of the mean.
        for name in ("mean'", "power", "twice", "square'"):
            self._make(name, 4 * hidden)
        self._drop("mean'", "power", "twice")
        self._make("input'", 4 * hidden)
        self._drop("square'", "scaled'")
        self._release(f"{norm} input", f"{norm} root")
        if not in_fp32:
            self._replace("input'", widths.residual * hidden, "input'")
            if residual:
                self._replace("input'", widths.residual * hidden, "input'", residual)
        self._live.rename("input'", "stream", "temporaries")
        self._framework.used_again(index)

    def _backward_of_embedding(self) -> None:
        """Its gradient is dense; if the head is tied, that of the head is added to it."""
        index = self._index["embed_tokens"]
        self._framework.use_again(index)
        new, size = new_gradient(index), self._widths.residual * self._framework.numel(index)
        if self._size.tied:
            self._live.rename(new, "gradient of the head", "gradients_transient")
        self._live.make(new, "gradients_transient", size)
        self._drop("stream")
        if self._size.tied:
            self._live.make("sum of both", "gradients_transient", size)
            self._drop(new, "gradient of the head")
            self._live.rename("sum of both", new, "gradients_transient")
        self._framework.gradient(index)
        self._framework.used_again(index)
