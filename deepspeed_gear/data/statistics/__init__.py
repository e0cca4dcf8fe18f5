"""Statistics of columns: moments, quantiles and counts of pixel values."""
