"""The relayout: puts what arrived in the producer's shape in its place, all of a wave in one launch."""
