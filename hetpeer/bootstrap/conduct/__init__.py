"""What volunteers have earned and forfeited: reputation, disputed pairs, outliers."""
