"""Why a PyTorch training script is slow: the verdict of `anysize why`."""
