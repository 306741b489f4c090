# ruff: noqa: F401
from hocket.data.proto import DataProto, DataProtoConfig, DataProtoItem
from hocket.data.reshape import (
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from hocket.data.tensordict_utils import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
    union_numpy_dict,
    union_tensor_dict,
)
from hocket.single_controller import DataProtoFuture
