# ruff: noqa: F401
from hocket.single_controller import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    collect_all_to_all,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
