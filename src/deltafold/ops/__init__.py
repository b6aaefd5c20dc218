"""The op list: every tensor operation a model needs beyond a matrix product, its shapes and its in-place effects.

Three modules implement it with the same signatures: `reference` (literal, float32, the judge), `portable`
(vectorised PyTorch, runs anywhere) and `triton` (GPU). `select` picks one, once, in `Engine.load`.
Letters: T tokens, N requests, H query/key heads, HV value heads, K/V head dims, D channels, W conv width, S state
slots, E experts, R latent rank, P extra key dims; the glossary has them all.
"""

from __future__ import annotations

import enum
import importlib
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from deltafold.errors import OptionError

PAD_SLOT = -1
"""The slot of a padded row. Every op skips it: nothing is read or written for it, and its output rows are zero."""

CHUNK_SIZE = 64
"""Tokens per chunk of the chunked delta rule; prefill chunks start on its multiples."""

Activation = Literal["silu", "sigmoid"]
Scoring = Literal["sigmoid", "softmax"]


class Backend(enum.StrEnum):
    """Which implementation of the op list runs."""

    REFERENCE = "reference"
    PORTABLE = "portable"
    TRITON = "triton"


class Ops(Protocol):
    """The op list. All outputs are new tensors unless the docstring says "in place".

    `query_start_loc [N + 1]` int32 delimits the requests in the ragged token axis: request i owns tokens
    `query_start_loc[i] : query_start_loc[i + 1]`, possibly none. `state_slots [N]` int32 may hold PAD_SLOT; the
    slots of a call are otherwise distinct. `has_initial_state [N]` bool: where false the state counts as zero,
    whatever the slot's memory holds (NaN included), and the slot is overwritten.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis in float32, returned as `dtype`.

        x [..., D] float32 or bfloat16; weight [D].
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """`residual += x` in place (in float32, rounded once to residual's dtype), then `rms_norm(residual)`.

        x, residual [T, D]; weight [D]. Returns [T, D] in `dtype`.
        """

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
        """`rms_norm(x) * activation(gate)`, all in float32, returned in gate's dtype.

        x, gate [..., V]; weight [V].
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[..., :I]) * x[..., I:]` in float32, returned in x's dtype. x [T, 2 * I] -> [T, I]."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        query_start_loc: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """Depthwise causal convolution over each request's tokens, then SiLU; computed in float32.

        `y[t, d] = silu(sum_w weight[d, w] * x[t - W + 1 + w, d])`, where the W - 1 tokens before a request's
        first are its `conv_state[slot]` (oldest first), or zero. In place: `conv_state[slot]` becomes the last
        W - 1 inputs of the request (those of the old state included while it has fewer tokens than that).

        x [T, D]; weight [D, W]; conv_state [S, D, W - 1] in x's dtype. Returns [T, D] in x's dtype.
        """

    def decay_gate(self, raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        """The log decay `-exp(A_log) * softplus(raw_gate + dt_bias)` in float32; at most 0, unbounded below.

        KDA: raw_gate [T, HV, K], A_log [HV], dt_bias [HV, K]. GDN: raw_gate [T, HV], A_log [HV], dt_bias [HV].
        """

    def chunked_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        recurrent_state: Tensor,
        query_start_loc: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """The gated delta rule over each request's tokens, in chunks of CHUNK_SIZE counted from its first token
        of this call (which the scheduler puts on the chunk grid).

        Per token and value head, with `q, k` L2-normalised (`x * rsqrt(sum(x^2) + 1e-6)`) and q scaled by
        K^-1/2, S in float32:  `S' = exp(g)[:, None] * S;  S = S' + beta * k (v - k^T S')^T;  o = q^T S`.
        Value head h reads query/key head `h // (HV // H)`.

        q, k [T, H, K]; v [T, HV, V]; g [T, HV, K] (KDA) or [T, HV] (GDN) float32, any value <= 0, -inf included
        in effect (exp underflows to 0); beta [T, HV] float32, already in (0, 1); recurrent_state [S, HV, K, V]
        float32, in place: the state after each request's last token. Returns o [T, HV, V] in v's dtype.
        """

    def recurrent_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        recurrent_state: Tensor,
        query_start_loc: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """The same as `chunked_delta_rule`, token by token. For decode steps (one token a request) it is the
        fast form; for any length it is the definition."""

    def delta_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        recurrent_state: Tensor,
        query_start_loc: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """`chunked_delta_rule` with `g = decay_gate(raw_gate, A_log, dt_bias)` and `beta = sigmoid(beta_logits)`.

        raw_gate [T, HV, K] or [T, HV]; beta_logits [T, HV]; the others as for those ops. Returns o [T, HV, V].
        """

    def delta_step(
        self,
        qkv: Tensor,
        conv_weight: Tensor,
        conv_state: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        out_gate: Tensor,
        norm_weight: Tensor,
        eps: float,
        activation: Activation,
        recurrent_state: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """A delta-rule layer between its projections, for one token a request: `causal_conv` of qkv, the gates,
        `recurrent_delta_rule`, then `gated_rms_norm` with `out_gate`. In place: `conv_state` and `recurrent_state`.

        qkv [N, D], D = 2 * H * K + HV * V (q, k, v); conv_weight [D, W]; conv_state [S, D, W - 1] in qkv's dtype;
        raw_gate [N, HV, K] or [N, HV]; beta_logits [N, HV]; out_gate [N, HV, V]; norm_weight [V]; the others as for
        those ops. Returns [N, HV, V] in out_gate's dtype.
        """

    def low_rank_delta_step(
        self,
        qkv: Tensor,
        conv_weight: Tensor,
        conv_state: Tensor,
        gate_low: Tensor,
        gate_up: Tensor,
        beta_logits: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        out_low: Tensor,
        out_up: Tensor,
        norm_weight: Tensor,
        eps: float,
        activation: Activation,
        recurrent_state: Tensor,
        state_slots: Tensor,
        has_initial_state: Tensor,
    ) -> Tensor:
        """`delta_step` with gates of low rank: `raw_gate = gate_low gate_up^T` and `out_gate = out_low out_up^T`, each
        rounded to qkv's dtype.

        gate_low [N, RF]; gate_up [HV * K, RF]; out_low [N, RG]; out_up [HV * V, RG]; dt_bias [HV, K]; the others as for
        `delta_step`. Returns [N, HV, V] in qkv's dtype.
        """

    def latent_store(self, kv_c: Tensor, k_pe: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
        """In place: row `slot_mapping[t]` of the cache (block = slot // block_size) becomes `[kv_c[t] | k_pe[t]]`.

        kv_c [T, R]; k_pe [T, P]; latent_cache [num_blocks, block_size, R + P]; slot_mapping [T] int64, PAD_SLOT
        rows are skipped.
        """

    def mla_prefill(
        self,
        q: Tensor,
        kv_b: Tensor,
        latent_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Causal attention of each request's new tokens over its whole latent context, expanded through `kv_b`.

        The new tokens are the last of `seq_lens[i]` tokens and already stored. For head h and context row
        `[c | p]`: `k = [W_UK[h] c | p]`, `v = W_UV[h] c` with `kv_b[h] = [W_UK[h]; W_UV[h]]`; softmax over
        `scale * q . k` in float32.

        q [T, H, nope + P]; kv_b [H, nope + V, R]; latent_cache [num_blocks, block_size, R + P]; seq_lens [N]
        int32 (0 for a padded row); block_table [N, max_blocks] int32. Returns [T, H, V] in q's dtype.
        """

    def mla_decode(
        self, q: Tensor, latent_cache: Tensor, seq_lens: Tensor, block_table: Tensor, rank: int, scale: float
    ) -> Tensor:
        """Absorbed attention of one token a request over its latent context; `rank` is R.

        Score of row `[c | p]` is `scale * q . [c | p]` in float32; the result is the softmax-weighted sum of c.
        q [N, H, R + P]; seq_lens [N] int32, 0 for a padded row, whose output is zero. Returns [N, H, R].
        """

    def mla_step(
        self,
        q: Tensor,
        kv_b: Tensor,
        latent_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """`mla_prefill` of one token a request, by absorption: `W_UK` into the query, `mla_decode`, `W_UV` after.

        q [N, H, nope + P]; kv_b [H, nope + V, R], dense; the others as for `mla_decode`. Returns [N, H, V].
        """

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        scoring: Scoring,
        num_groups: int,
        top_k_groups: int,
        best_per_group: int,
        renormalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Chooses `top_k` experts a token and their weights, in float32.

        `s = scoring(logits)`; the choice goes by `s + bias` (restricted, if num_groups > 1, to the `top_k_groups`
        groups of consecutive experts with the largest sum of their `best_per_group`, 1 or 2, best choice scores); the
        weights are the *unbiased* s of the chosen, divided by (their sum + 1e-20) if `renormalize`, times `scale`.

        logits [T, E] float32; bias [E] float32 or None. Returns weights [T, top_k] float32, ids [T, top_k] int32,
        best choice score first, lower id first among equals.
        """

    def grouped_experts(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """`sum_j weights[t, j] * w2[e] (silu(w1[e] x[t]) * (w3[e] x[t]))` with e = ids[t, j]; sum in float32.

        x [T, D]; w13 [E, 2 * I, D] (w1 above w3); w2 [E, D, I]; weights [T, J] float32; ids [T, J] int32, -1 is
        skipped. Returns [T, D] in x's dtype.
        """

    def routed_experts(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        w13: Tensor,
        w2: Tensor,
        top_k: int,
        scoring: Scoring,
        num_groups: int,
        top_k_groups: int,
        best_per_group: int,
        renormalize: bool,
        scale: float,
    ) -> Tensor:
        """`route`, then `grouped_experts`. Experts stacked after the E that have logits are shared ones: every token
        takes them with weight 1.

        x [T, D]; logits [T, E]; w13 [E + shared, 2 * I, D]; w2 [E + shared, D, I]; the others as for `route`.
        Returns [T, D] in x's dtype.
        """

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x * sigmoid(gate)` in float32, returned in x's dtype. x [T, D]; gate [T, D] or [T, 1]."""

    def rotary(
        self, heads: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float, is_interleaved: bool
    ) -> None:
        """In place: turns the first 2 * F values of every head by the token's position, in float32.

        Pair i (values 2i and 2i + 1 if `is_interleaved`, else i and i + F) turns by the angle
        `positions[t] * inverse_frequencies[i]`, itself a float32 product: `(a, b)` becomes
        `factor * (a cos - b sin, b cos + a sin)`. What lies beyond 2 * F stays.

        heads [T, H, K], of any strides; positions [T] int64; inverse_frequencies [F] float32.
        """

    def kv_store(self, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """In place: row `slot_mapping[t]` of the caches (block = slot // block_size) becomes `k[t]` and `v[t]`.

        k [T, HK, K]; v [T, HK, V]; key_cache [num_blocks, block_size, HK, K] and value_cache [.., HK, V], HK the
        number of key/value heads; slot_mapping [T] int64, PAD_SLOT rows are skipped.
        """

    def gqa_prefill(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        """Causal attention of each request's new tokens over its whole context in the paged caches.

        The new tokens are the last of `seq_lens[i]` tokens and already stored. Head h reads key/value head
        `h // (H // HK)`; softmax over `scale * q . k` in float32.

        q [T, H, K]; caches as for `kv_store`; seq_lens [N] int32 (0 for a padded row); block_table [N, max_blocks]
        int32. Returns [T, H, V] in q's dtype.
        """

    def gqa_decode(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
    ) -> Tensor:
        """`gqa_prefill` of one token a request; a padded row's output (seq_lens 0) is zero.

        q [N, H, K]; the others as for `gqa_prefill`. Returns [N, H, V] in q's dtype.
        """

    def linear(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`x @ weight^T`, summed in float32 and returned as `dtype`.

        x [T, K]; weight [N, K] in x's dtype. With `dtype` float32 nothing is rounded on the way. Returns [T, N].
        """

    def greedy(self, logits: Tensor) -> Tensor:
        """Of each row the id of its largest logit, the lowest among equals, and 1 if all its logits are finite, else 0
        (its id is then any of the vocabulary's).

        logits [N, vocab] float32. Returns [2, N] int64, ids above flags: one tensor is one copy to the host.
        """


def select(backend: Backend | str) -> Ops:
    """The implementation named; raises OptionError for an unknown name, ImportError if it cannot be imported."""
    try:
        name = Backend(backend).value
    except ValueError:
        choices = ", ".join(Backend)
        raise OptionError(f"ops backend must be one of {choices}, got {backend!r}") from None
    return cast(Ops, importlib.import_module(f"deltafold.ops.{name}"))
