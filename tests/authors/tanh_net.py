"""A net of linear layers with tanh between them."""

from torch import Tensor, nn


class TanhNet(nn.Module):
    """`layers` layers of `width`, then one to `outputs` numbers. x: float32, batch x width."""

    def __init__(self, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
