"""autotune beside other libraries: runs, reports, plots."""
