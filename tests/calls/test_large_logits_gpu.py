"""On a real GPU, too, equal logits give the mean of V however large they are (G1), in every kernel that serves them."""

import pytest
from gpu_arrays import torch_fixture  # noqa: F401 (a fixture)

import autotune
from autotune.core.gpu import detect
from autotune.core.problem import Problem
from autotune.kernels import candidates

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

SIDE = 133120.0  # bf16 queries and keys all of which are so: scaled logits of 1.4e11
SIZES = [("forward", 1, 1), ("forward", 5, 70), ("forward", 300, 300), ("decode", 1, 70), ("decode", 1, 5000)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("op, queries, keys", SIZES)
def test_g1_equal_logits_however_large_give_the_mean_of_v(torch, op, queries, keys, head_dim, sign):
    problem = Problem(op, batch=1, heads_q=1, heads_kv=1, seqlen_q=queries, seqlen_k=keys, head_dim=head_dim)
    v = torch.randn(1, keys, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k = (torch.full((1, n, 1, head_dim), 1.0, device="cuda", dtype=torch.bfloat16) for n in (queries, keys))

    def attention(q, k, config):
        if op == "decode":
            lengths = torch.tensor([keys], device="cuda", dtype=torch.int32)
            return autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, return_lse=True, config=config)
        return autotune.attention(q, k, v, return_lse=True, config=config)

    gpu = detect()
    kernels = candidates(problem, gpu)
    assert kernels
    for kernel in kernels:
        config = kernel.default(problem, gpu)
        out, lse = attention(sign * SIDE * q, SIDE * k, config)
        small, _ = attention(q, k, config)
        assert torch.isfinite(lse).all(), config
        torch.testing.assert_close(out, small, rtol=0, atol=0)
        torch.testing.assert_close(out.float(), v.float().mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-2)
