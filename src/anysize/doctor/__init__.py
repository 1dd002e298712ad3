"""Why a training is slow: measurements, and findings that each show their measurement."""
