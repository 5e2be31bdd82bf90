"""Records of volunteers' conduct: reputation, disputed pairs, outliers."""
