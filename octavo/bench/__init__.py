"""What ``octavo bench`` measures, how, and against what."""
