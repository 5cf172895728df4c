"""A web page that runs the kernels and the decoder in a browser, compiled to WebAssembly.

build: makes the page's files. bundle: the page as one file. serve: shows them on this machine.
traffic: its counts in JavaScript. csrc/ is what the page calls in C++; js/ is the page, plain modules.
"""
