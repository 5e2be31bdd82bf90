"""Models of timm for `make zoo` by family of timm, one small variant of each, and settings of their own.

A family of timm is an architecture with a file or a name of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES: Mapping[str, tuple[str, str]] = {
    "convolutions": (
        "image",
        """
        resnet10t resnetv2_50x1_bit resnest14d res2net50_14w_8s skresnet18 legacy_seresnet18 ecaresnet26t
        regnetx_002 regnety_002 regnetz_005 gernet_s repvgg_a0 mobileone_s0 eca_resnext26ts densenet121
        dla34 dpn68 vgg11_bn vovnet39a ese_vovnet19b_dw cspdarknet53 cs3darknet_focus_s cspnext_tiny
        selecsls42 hrnet_w18_small inception_v3 inception_v4 inception_resnet_v2 xception41 legacy_xception
        tresnet_m nf_resnet26 eca_nfnet_l0 rexnet_100 hgnet_tiny hgnetv2_b0 efficientnet_b0 mixnet_s
        tinynet_e mnasnet_small mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035 lcnet_035
        ghostnet_050 repghostnet_050 fasternet_t0 starnet_s050 convnext_atto convmixer_768_32
        inception_next_atto mambaout_femto rdnet_tiny
        """,
    ),
    "transformers of images": (
        "image",
        """
        vit_tiny_patch16_224 vit_relpos_small_patch16_224 vit_small_r26_s32_224 samvit_base_patch16_224
        deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224
        cait_xxs24_224 convit_tiny crossvit_tiny_240 davit_tiny hiera_tiny_224 mvitv2_tiny nest_tiny
        pit_ti_224 pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tnt_s_patch16_224
        twins_pcpvt_small visformer_tiny volo_d1_224 xcit_nano_12_p16_224 gcvit_xxtiny
        """,
    ),
    "mixers and hybrids of images": (
        "image",
        """
        mixer_s32_224 gmlp_ti16_224 resmlp_12_224 sequencer2d_s coat_lite_tiny coatnet_nano_rw_224
        maxvit_rmlp_pico_rw_256 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0
        efficientvit_m0 efficientvim_m1 fastvit_t8 focalnet_tiny_srf iformer_t levit_128s lowformer_b0
        mobilevit_xxs mobilevitv2_050 nextvit_small repvit_m0_9 shvit_s1 swiftformer_xs tiny_vit_5m_224
        vitamin_small_224 botnet26t_256 lambda_resnet26t
        """,
    ),
}
"""Family → its task, and its models."""

_DEEP = """
vit_tiny_patch16_224 vit_relpos_small_patch16_224 vit_small_r26_s32_224 samvit_base_patch16_224
deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 cait_xxs24_224
convit_tiny tnt_s_patch16_224 xcit_nano_12_p16_224
"""
SETTINGS: Mapping[str, Mapping[str, Any]] = {name: {"depth": 2} for name in _DEEP.split()}
"""Model → settings of its own."""
SIZES: Mapping[str, int] = {
    "inception_v3": 96,
    "inception_v4": 96,
    "inception_resnet_v2": 96,
    "samvit_base_patch16_224": 224,
    "crossvit_tiny_240": 240,
    "efficientformer_l1": 224,
}
"""Model → edge of its images, where that is not `SIZE`."""
