"""A web page that runs the kernels and the decoder in a browser, compiled to WebAssembly.

build makes the page's files. csrc/ is what the page calls in C++; js/ is the page, plain modules, which are
served as they are written.
"""
