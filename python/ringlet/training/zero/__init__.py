"""ZeRO stages 1, 2 and 3 over torch.distributed: `Zero`, and `Offload` for what it keeps elsewhere."""

from .options import Offload
from .zero import Zero

__all__ = ["Offload", "Zero"]
