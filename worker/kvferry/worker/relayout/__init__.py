"""The relayout: moves bytes that arrived in the producer's layout to their place, a whole wave in one launch."""
