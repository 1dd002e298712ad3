"""From a folder of images and masks to batches on canvases."""
