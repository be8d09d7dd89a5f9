"""What a run writes down and shows; everything that shows a run reads its folder alone."""
