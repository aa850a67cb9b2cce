"""Lists all loaders that are measured, in the order of the table."""

from tests.benchmarks.loaders import basics, peers
from tests.benchmarks.loaders.competitor import Competitor

BARE = (
    "np.memmap gather, bare loop",
    "torch.index_select, bare loop",
    "torch.index_select, one thread",
)
OURS = "hpctrain"
ALONE = "hpctrain, no thread"
MEMMAP = "np.memmap by batch, DataLoader"
LMDB = "lmdb"
BLOCK = "hpctrain, block shuffle"

COMPETITORS: dict[str, type[Competitor]] = {
    BARE[0]: basics.NumpyGather,
    BARE[1]: basics.IndexSelect,
    BARE[2]: basics.IndexSelectAlone,
    OURS: basics.Hpctrain,
    ALONE: basics.HpctrainAlone,
    BLOCK: basics.HpctrainBlock,
    MEMMAP: basics.Memmap,
    "nothing, DataLoader": basics.Idle,
    "h5py, one sample a read": basics.H5pySamples,
    "h5py, fancy index by batch": basics.H5pyBatches,
    LMDB: peers.Lmdb,
    "webdataset": peers.Webdataset,
    "mosaicml-streaming": peers.Streaming,
    "Hugging Face datasets": peers.Datasets,
    "datasets, Arrow by hand": peers.DatasetsArrow,
    "grain": peers.Grain,
    "litdata": peers.Litdata,
}
