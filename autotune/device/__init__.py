"""From a cubin to a launch: arrays, streams, tensor maps, counters."""
