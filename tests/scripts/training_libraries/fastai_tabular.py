"""fastai: a tabular learner from a pandas frame, one-cycle fit with mixed precision callbacks, predictions."""

import numpy as np
import pandas as pd
import torch
from fastai.callback.schedule import *
from fastai.tabular.all import *

set_seed(1, reproducible=True)
rng = np.random.default_rng(0)
frame = pd.DataFrame(
    {
        "kind": rng.choice(["a", "b", "c"], 200),
        "size": rng.random(200),
        "age": rng.integers(1, 90, 200).astype(float),
        "label": rng.choice(["yes", "no"], 200),
    }
)
dls = TabularDataLoaders.from_df(
    frame,
    ".",
    procs=[Categorify, FillMissing, Normalize],
    cat_names=["kind"],
    cont_names=["size", "age"],
    y_names="label",
    valid_idx=list(range(160, 200)),
    bs=32,
    device=default_device(),
)
learn = tabular_learner(dls, layers=[32, 16], metrics=accuracy)
with learn.no_bar(), learn.no_logging():
    learn.fit_one_cycle(2)
    preds, targets = learn.get_preds()
print(
    "vocabulary",
    list(dls.vocab),
    "predictions",
    tuple(preds.shape),
    "targets",
    int(targets.sum()),
    "epochs",
    len(learn.recorder.values),
    torch.is_tensor(preds),
)
learn.export("export.pkl")
