"""Data sets as tensors: the digits of scikit-learn, and MNIST and CIFAR-10 from files or the network.

    files.py      file formats: readers that turn any damage into a DataError
    download.py   transfer: checksummed, resumable, atomic
    sets.py       the data sets, and `load_data_set`

Nothing here shards, shuffles, augments or batches; the network is used only with `download`.
"""

from offbeat.data.download import DownloadProgress
from offbeat.data.sets import DATA_SETS, DEFAULT_DIR, Splits, load_data_set, resolve_data_dir
from offbeat.errors import DataError

__all__ = [
    "DATA_SETS",
    "DEFAULT_DIR",
    "DataError",
    "DownloadProgress",
    "Splits",
    "load_data_set",
    "resolve_data_dir",
]
