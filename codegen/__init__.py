"""From a graph to an artifact directory: schedule, memory plan, rendering, writing."""
