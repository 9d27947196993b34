"""skorch: NeuralNetClassifier with early stopping and a scikit-learn grid search on the digits data."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping
from torch import nn

torch.manual_seed(0)
digits = load_digits()
X, y = digits.data[:300].astype("float32") / 16, digits.target[:300].astype("int64")


class Net(nn.Module):
    def __init__(self, num_units=32):
        super().__init__()
        self.sequential = nn.Sequential(
            nn.Linear(64, num_units), nn.ReLU(), nn.Dropout(0.5), nn.Linear(num_units, 10), nn.Softmax(dim=-1)
        )

    def forward(self, X):
        return self.sequential(X)


net = NeuralNetClassifier(
    Net,
    max_epochs=2,
    lr=0.1,
    iterator_train__shuffle=True,
    callbacks=[EarlyStopping(patience=5)],
    verbose=0,
    device="cuda" if torch.cuda.is_available() else "cpu",
)
net.fit(X, y)
probabilities = net.predict_proba(X)
print("epochs", len(net.history), "probabilities", probabilities.shape, "predicted", net.predict(X).shape)
search = GridSearchCV(
    net, {"lr": [0.05, 0.1], "module__num_units": [8, 16]}, cv=2, scoring="accuracy", refit=False, error_score="raise"
)
search.fit(X, y)
print("settings tried", len(search.cv_results_["params"]), f"best score {search.best_score_:.4f}")
