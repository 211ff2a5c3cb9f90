"""What vLLM calls when it starts (entry point group vllm.general_plugins): names autotune's backend, imports nothing of it."""


def register() -> None:
    """Makes `--attention-backend CUSTOM` autotune's. May be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "autotune.integrations.vllm.AutotuneBackend")
