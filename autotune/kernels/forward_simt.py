from .forward_mma import ForwardMma
class ForwardSimt(ForwardMma):
    name="forward_simt"
