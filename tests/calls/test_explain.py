"""The other entry points: source(), explain(), and the package's lazy names."""

import subprocess
import sys

import numpy as np
import pytest
from fake_arrays import GPU, Tensor, aligned, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.device.arrays import AttentionError
from autotune.kernels import kernel_of
from autotune.core.problem import Problem


def test_source_is_what_lookup_chooses_or_the_config_that_is_named():
    text = autotune.source("forward-bf16-b1-h8x2-q512-k512-d64-causal", gpu="nvidia-h200")
    assert "forward_wgmma" in text and "BLOCK_N" in text
    problem = Problem(heads_q=8, heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64, window_right=0)
    config = kernel_of(autotune.lookup(problem, GPU).config).default(problem, GPU)
    assert autotune.source(problem, config.text, GPU) == autotune.source(problem, config, GPU)
    with pytest.raises(AttentionError, match="cannot serve .* smem_bytes is 1, but the other values need"):
        autotune.source(problem, config.text.replace(f"smem_bytes={config['smem_bytes']}", "smem_bytes=1"), GPU)
    with pytest.raises(ValueError, match="block_n is '7'; legal values are"):
        autotune.source(problem, config.text.replace(f"block_n={config['block_n']}", "block_n=7"), GPU)
    with pytest.raises(AttentionError, match="no kernel can serve"):
        autotune.source("forward-bf16-b1-h8x2-q512-k512-d4096", gpu="nvidia-h200")


def test_explain_names_kernel_match_refusals_and_copies(gpu):
    q, k, v = qkv()
    text = str(autotune.explain(q, k, v, causal=True))
    assert "forward_wgmma" in text and "refused" not in text and "copies   none" in text and "autotune tune --problem" in text
    odd = Tensor(aligned((2, 7, 2, 68), v.dtype)[..., :64])
    explanation = autotune.explain(q, k, odd, scale=-1.0)
    assert [copy[:12] for copy in explanation.copies] == ["q is negated", "v is copied:"] and "strides" in explanation.copies[1]
    slopes = Tensor(np.full(4, 0.5, np.float16))
    assert [copy[:24] for copy in autotune.explain(q, k, v, alibi_slopes=slopes).copies] == ["alibi_slopes is copied: "]
    assert autotune.explain(q, k, v, alibi_slopes=Tensor(np.full((2, 4), 0.5, np.float32))).copies == ()
    simt = autotune.explain(*qkv(dtype="fp32"))
    assert simt.kernel.name == "forward_simt" and "fp32" in simt.refused["forward_mma"]
    assert "fp32" in simt.refused["forward_wgmma"]
    empty = autotune.explain(*qkv(seqlen_k=0))
    assert empty.kernel is None and "nothing is launched" in str(empty)
    assert not gpu.launches and not gpu.built


def test_explain_says_which_array_the_copy_engine_cannot_read(gpu):
    q, k, v = qkv()
    one_for_all = Tensor(np.broadcast_to(k.array[:1], k.shape))
    explanation = autotune.explain(q, one_for_all, v)
    assert explanation.kernel.name == explanation.match.config.kernel == "forward_mma" and explanation.copies == ()
    assert explanation.refused == {"forward_wgmma": "it cannot take k: its batch stride is 0 elements; "
                                                    "TMA takes 1 to 549755813887"}
    assert "default: what lookup chose cannot take these arrays" in str(explanation)
    backwards = Tensor(q.array[:, ::-1])
    assert "cannot take q: its row stride is -256" in autotune.explain(backwards, k, v).refused["forward_wgmma"]
    assert autotune.explain(backwards, k, v, scale=-1).kernel.name == "forward_wgmma"  # negated, and so copied
    assert not gpu.launches and not gpu.built


def test_import_is_light_and_names_are_functions():
    code = ("import sys, time; t = time.perf_counter(); import autotune; spent = time.perf_counter() - t\n"
            "assert spent < 0.3, spent\n"
            "assert not {'cupy', 'torch', 'numpy', 'jinja2', 'optuna', 'yaml'} & set(sys.modules)\n"
            "from autotune import attention, Match, Problem, Config, Gpu, explain, prepare, source, lookup, attention_varlen\n"
            "assert callable(autotune.attention) and callable(autotune.lookup) and callable(autotune.explain)\n"
            "assert not {'cupy', 'torch', 'jinja2', 'optuna'} & set(sys.modules)\n"
            "assert set(autotune.__all__) <= set(dir(autotune))\n"
            "try:\n    autotune.nonsense\nexcept AttributeError as e:\n    assert 'nonsense' in str(e)\n"
            "else:\n    assert False\n")
    subprocess.run([sys.executable, "-c", code], check=True)
