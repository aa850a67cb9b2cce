"""Everybody who takes part, in the order of the table."""

from tests.benchmarks.loaders import basics, peers
from tests.benchmarks.loaders.competitor import Competitor

LIMITS = ("np.memmap gather, bare loop", "torch.index_select, bare loop")
AHEAD = "torch.index_select, four batches live"
OURS = "hpctrain"
ALONE = "hpctrain, no thread"
BLOCK = "hpctrain, block shuffle"

COMPETITORS: dict[str, type[Competitor]] = {
    LIMITS[0]: basics.NumpyGather,
    LIMITS[1]: basics.IndexSelect,
    AHEAD: basics.IndexSelectLive,
    OURS: basics.Hpctrain,
    ALONE: basics.HpctrainAlone,
    BLOCK: basics.HpctrainBlock,
    "np.memmap by batch, DataLoader": basics.Memmap,
    "nothing, DataLoader": basics.Idle,
    "h5py, one sample a read": basics.H5pySamples,
    "h5py, fancy index by batch": basics.H5pyBatches,
    "lmdb": peers.Lmdb,
    "webdataset": peers.Webdataset,
    "mosaicml-streaming": peers.Streaming,
    "Hugging Face datasets": peers.Datasets,
    "datasets, Arrow by hand": peers.DatasetsArrow,
    "grain": peers.Grain,
    "litdata": peers.Litdata,
}
