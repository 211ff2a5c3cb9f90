"""What SGLang calls when it starts (entry point group sglang.srt.plugins): names autotune's backend, imports nothing of it."""

NAME = "autotune"


def register() -> None:
    """Makes `--attention-backend autotune` ours. May be called again."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(make)


def make(runner):
    """The backend of a model runner of SGLang's."""
    from .sglang import AutotuneAttnBackend

    return AutotuneAttnBackend(runner)
