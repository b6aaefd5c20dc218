"""Writing the latent cache: one row `[kv_c | k_pe]` a token at its slot. Reading it is in `attention.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor


@triton.jit(do_not_specialize=["p_slots"])
def latent_store_kernel(
    p_kv_c,  # [T, R]
    p_k_pe,  # [T, P]
    p_cache,  # [num_blocks, block_size, R + P]
    p_slots,  # [T] int64, negative: skipped
    stride_kv_c,
    stride_k_pe,
    stride_block,
    stride_row,
    block_size,
    R,
    P,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`cache[slot] = [kv_c[t] | k_pe[t]]`; grid (T,)."""
    i_t = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    slot = tl.load(p_slots + i_t)
    if slot >= 0:
        o_d = tl.arange(0, BLOCK)
        m_c = o_d < R
        m_pe = (o_d >= R) & (o_d < R + P)
        b_c = tl.load(p_kv_c + i_t * stride_kv_c + o_d, mask=m_c, other=0.0)
        b_pe = tl.load(p_k_pe + i_t * stride_k_pe + (o_d - R), mask=m_pe, other=0.0)
        p_row = p_cache + (slot // block_size) * stride_block + (slot % block_size) * stride_row
        dtype = p_cache.dtype.element_ty
        tl.store(p_row + o_d, tl.where(m_c, b_c.to(dtype), b_pe.to(dtype)), mask=m_c | m_pe)


def latent_store(kv_c: Tensor, k_pe: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.latent_store`; writes `latent_cache`."""
    T, R = kv_c.shape
    P = k_pe.shape[1]
    if T == 0:
        return
    latent_store_kernel[(T,)](
        kv_c,
        k_pe,
        latent_cache,
        slot_mapping,
        kv_c.stride(0),
        k_pe.stride(0),
        latent_cache.stride(0),
        latent_cache.stride(1),
        latent_cache.shape[1],
        R,
        P,
        BLOCK=triton.next_power_of_2(R + P),
        num_warps=4,
        **overlap(kv_c),
    )
