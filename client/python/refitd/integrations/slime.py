"""slime's weight updates through refitd: Megatron's parameters are registered where they are, and nothing is gathered.

    slime ... --custom-megatron-init-path refitd.integrations.slime.init

with REFITD_GROUP (and REFITD_SOCKET) in the environment of training and of SGLang, whose servers follow the group by refitd's plugin
(refitd.integrations.sglang). The updater that slime uses over NCCL is replaced where slime looks it up; slime calls nothing of SGLang for an
update. To set more than the group, name a function of yours that calls `install`.

Written from slime's source of August 2026 (commit 624b824). Not for colocated engines, offloaded training, or quantized updates.
"""

from .megatron import Updater

init = Updater.init
install = Updater.install
