"""Records of what tuning found, their files, and which of them serves a problem."""
