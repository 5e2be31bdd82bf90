"""A small ResNet (He et al., Deep Residual Learning, 2016) for 8x8 images: convolutions, BatchNorm, skips;
plain torch.

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = nn.Sequential()
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x_BCHW)))))
        y_BCHW += self.downsample(x_BCHW)
        return F.relu(y_BCHW, inplace=True)


class ResNet(nn.Module):
    """Images [B, 1, H, W] in; the mean cross entropy of the labels [B] out, or logits without labels."""

    def __init__(self, width: int = 16, stages: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        widths = [width << stage for stage in range(stages)]
        self.layers = nn.Sequential(
            *(
                Block(inner, outer, 1 if inner == outer else 2)
                for inner, outer in zip([width, *widths], widths, strict=False)
            )
        )
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        features_BC = self.layers(self.stem(image)).mean(dim=(2, 3))
        logits_BK = self.fc(features_BC)
        return logits_BK if label is None else F.cross_entropy(logits_BK, label)


def build() -> ResNet:
    """The model with fresh parameters."""
    return ResNet()
