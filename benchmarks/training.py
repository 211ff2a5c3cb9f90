"""Does a model train as with torch's own attention? Four layers of Llama 3 8B with random weights, 20 steps of AdamW on 4k
tokens, beside two runs with `scaled_dot_product_attention`, whose difference is noise; gradients of gpt-oss's attention with
sinks that are trained, beside plain attention in fp32; and what one autograd step costs the host.

    python benchmarks/training.py [--steps N] [--layers N] [--out FILE]

Needs a GPU and torch; takes about a minute.
"""

from __future__ import annotations

import math
import time
import warnings
from statistics import median

import _result
import torch
import torch.nn.functional as F

import autotune

TOKENS, WIDTH, HEADS, HEADS_KV, DIM, INNER, WORDS = 4096, 4096, 32, 8, 128, 14336, 32000  # fewer words than Llama's 128256
ROUNDS, STEPS_A_ROUND = 40, 50


def ours(q, k, v):
    return autotune.attention(q, k, v, causal=True)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(array.transpose(1, 2) for array in (q, k, v)), is_causal=True,
                                          enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


class Layer(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, columns = attend, (HEADS + 2 * HEADS_KV) * DIM
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = (torch.nn.Linear(*shape, bias=False) for shape in ((WIDTH, columns), (HEADS * DIM, WIDTH)))
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM))
        x = x + self.out(self.attend(*qkv.split((HEADS, HEADS_KV, HEADS_KV), 2)).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def losses(attend, steps: int, layers: int) -> list[float]:
    """The loss of each step, with weights and tokens that are the same each time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        body = [Layer(attend) for _ in range(layers)]
        model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *body, torch.nn.RMSNorm(WIDTH),
                                    torch.nn.Linear(WIDTH, WORDS, bias=False)).to(torch.bfloat16)
        tokens = torch.randint(WORDS, (1, TOKENS + 1))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b))


def eager(q, k, v, sinks, left: int | None):
    """gpt-oss's attention as transformers writes it: the sink is one more logit, which has no value."""
    group, rows = q.shape[2] // k.shape[2], q.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) / math.sqrt(q.shape[-1])
    apart = torch.arange(rows, device=q.device)[:, None] - torch.arange(rows, device=q.device)
    s = s.masked_fill((apart < 0) | (apart > (rows if left is None else left)), -math.inf)
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :-1], v.repeat_interleave(group, 2))


def sink_errors(left: int | None) -> dict[str, float]:
    """Of each gradient, error / largest value, ours in bf16 beside eager in fp32; and those of eager in bf16."""
    torch.manual_seed(1)
    arrays = [torch.randn(1, 1024, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (64, 8, 8)]
    sinks, weights = torch.randn(64, device="cuda", dtype=torch.bfloat16), torch.randn(1, 1024, 64, 64, device="cuda")

    def gradients(function, dtype):
        inputs = [array.to(dtype).requires_grad_() for array in (*arrays, sinks)]
        return torch.autograd.grad((function(*inputs).float() * weights).sum(), inputs)

    window = (left, 0) if left is not None else (None, None)
    exact = gradients(lambda *inputs: eager(*inputs, left), torch.float32)
    options = dict(causal=True, window=window)
    found = {"ours": gradients(lambda q, k, v, s: autotune.attention(q, k, v, sinks=s, **options), torch.bfloat16),
             "eager_bf16": gradients(lambda *inputs: eager(*inputs, left), torch.bfloat16)}
    return {f"{who}_{name}": round(float((a.float() - b).abs().max() / b.abs().max()), 5)
            for who, grads in found.items() for name, a, b in zip(("dq", "dk", "dv", "dsinks"), grads, exact)}


def host_us() -> dict[str, float]:
    """One forward and backward of a small problem, the GPU never waited for within a round."""
    arrays = [torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    dout, costs = torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16), {ours: [], sdpa: []}
    for n in range(ROUNDS):
        for function in (ours, sdpa)[::1 if n % 2 else -1]:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                torch.autograd.grad(function(*arrays), arrays, dout)
            costs[function].append((time.perf_counter() - began) / STEPS_A_ROUND * 1e6)
    return {"step_us": median(costs[ours][5:]), "sdpa_step_us": median(costs[sdpa][5:])}


def main() -> int:
    parser = _result.parser(__doc__, "training-h200.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    entrants = {"ours": ours, "sdpa": sdpa, "again": sdpa}
    runs = {name: losses(attend, options.steps, options.layers) for name, attend in entrants.items()}
    errors = {"full": sink_errors(None), "window_127": sink_errors(127)}
    host = host_us()
    noise, apart = furthest(runs["sdpa"], runs["again"]), furthest(runs["ours"], runs["sdpa"])
    names = ("dq", "dk", "dv", "dsinks")
    worst = max(row[f"ours_{name}"] / row[f"eager_bf16_{name}"] for row in errors.values() for name in names)
    summary = {"loss_apart": round(apart, 5), "sdpa_apart_from_itself": round(noise, 5),
               "sink_error_of_eager_bf16": round(worst, 3), "host_ratio": round(host["step_us"] / host["sdpa_step_us"], 3)}
    _result.write(options.out, gpu, summary, {"losses": runs, "gradients": errors, "host": host})
    return 0 if math.isfinite(apart) and worst <= 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
