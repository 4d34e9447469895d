"""The networks of timm that the sweep runs, one or two of each family, and image sizes other than 64."""

_NAMES = """
bat_resnext26ts beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_lite_tiny coatnet_nano_rw_224
convformer_s18 convmixer_768_32 convnext_atto convnextv2_atto crossvit_tiny_240 cs3darknet_s cspdarknet53
cspresnet50 darknet53 davit_tiny deit3_small_patch16_224 densenet121 dla34 dpn68 ecaresnet26t edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnetv2_rw_t efficientvit_b0 ese_vovnet19b_dw
eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 fbnetc_100 focalnet_tiny_srf gcresnet33ts gernet_s ghostnet_100
ghostnetv2_100 gmlp_ti16_224 hardcorenas_a hgnet_tiny hiera_tiny_224 hrnet_w18_small inception_next_tiny
inception_v4 lcnet_050 levit_128s mambaout_femto maxvit_pico_rw_256 mixer_s16_224 mixnet_s mnasnet_small
mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs mobilevitv2_050
mvitv2_tiny nf_resnet26 pit_ti_224 poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002 regnetz_b16 repghostnet_050
repvgg_a0 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d resnet18 resnet50d resnetaa50 resnetblur18
resnetv2_50 resnetv2_50x1_bit resnext50_32x4d rexnet_100 selecsls42 semnasnet_050 seresnet18 sequencer2d_s
skresnet18 starnet_s1 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 tf_efficientnet_lite0 tinynet_e
tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11_bn visformer_tiny vit_tiny_patch16_224 volo_d1_224
xception41 xcit_nano_12_p16_224
"""
TIMM = tuple(_NAMES.split())

SIZES = {
    "torchvision/inception_v3": 96,
    "torchvision/googlenet": 96,
    "torchvision/vit_h_14": 112,
    "torchvision/vit_*": 128,
    "torchvision/maxvit_t": 224,
    "torchvision/*_resnet*": 96,
    "timm/inception_v4": 128,
    "timm/selecsls*": 96,
    "timm/crossvit*": 240,
    "timm/maxvit*": 256,
    "timm/hiera*": 224,
    "timm/*_224": 224,
    "timm/*_256": 256,
    "timm/bat*": 256,
    "timm/edgenext*": 96,
    "timm/efficientformer*": 224,
    "timm/levit*": 224,
    "timm/coat*": 224,
    "timm/mvitv2*": 224,
    "timm/sequencer2d*": 224,
    "timm/visformer*": 224,
    "timm/davit*": 224,
    "timm/twins*": 224,
    "timm/pvt*": 224,
}
"""First match wins; networks with position embeddings or windows keep the size they were made for."""

SLOW = (
    "torchvision/efficientnet_b[4567]",
    "torchvision/efficientnet_v2_[ml]",
    "torchvision/densenet201",
    "torchvision/vgg*",
    "torchvision/wide_resnet101_2",
    "torchvision/resnext101*",
    "torchvision/swin*_b",
    "torchvision/convnext_large",
    "torchvision/regnet_?_32gf",
    "torchvision/vit_l_*",
)
"""Run after the others, in this order: many layers or more than 90 million parameters."""

ALONE = ("torchvision/vit_h_14", "torchvision/regnet_y_128gf")
"""More than 600 million parameters: 12 GiB of memory each."""
