"""Records, files and views of a run; everything that shows a run reads its folder alone."""
