"""SGLang general plugin: EAGLE3 on a plain x86 CPU (no AMX, no sgl-kernel wheel)."""
import os


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.attention import attention_registry as reg
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def make(runner):
        from tide_sglang_cpu.attention import TorchSpecAttnBackend

        return TorchSpecAttnBackend(runner)

    reg.ATTENTION_BACKENDS["torch_native"] = make

    def create_backend(orig, self, backend_name, backend_map, error_template, stamps_children=False):
        from tide_sglang_cpu.attention import TorchSpecAttnBackend, TorchSpecMultiStepDraftBackend

        backend_map = dict(backend_map)
        if stamps_children:
            backend_map["torch_native"] = lambda: (
                "torch_native",
                TorchSpecMultiStepDraftBackend(self.draft_model_runner, self.topk, self.speculative_num_steps),
            )
        else:
            backend_map["torch_native"] = lambda: ("torch_native", TorchSpecAttnBackend(self.draft_model_runner))
        return orig(self, backend_name, backend_map, error_template, stamps_children)

    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", create_backend, HookType.AROUND
    )
