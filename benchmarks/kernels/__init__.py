"""What one thread makes of bytes: copies, resized images, columns of JSON."""
