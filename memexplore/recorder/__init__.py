"""Notes what every op allocated and freed, with layer, phase, step and line; judges nothing until afterwards."""
