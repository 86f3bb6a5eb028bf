"""The request scheduler: admission, batch building, overlap with the device, publishing."""
