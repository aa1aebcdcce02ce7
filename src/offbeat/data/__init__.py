"""Data sets as tensors: the digits that come with scikit-learn, MNIST and CIFAR-10 from files or the network.

    files.py      what a file must look like: readers that turn any damage into a DataError
    download.py   how a file gets here: checksummed, resumable, atomic
    sets.py       what a set consists of, and `load`

Nothing here shards, shuffles, augments or batches; nothing goes to the network unless `download` says so.
"""

from offbeat.data.download import Progress
from offbeat.data.sets import DEFAULT_DIR, SETS, Splits, data_folder, load
from offbeat.errors import DataError

__all__ = ["DEFAULT_DIR", "SETS", "DataError", "Progress", "Splits", "data_folder", "load"]
