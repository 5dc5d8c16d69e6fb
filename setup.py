"""Hand what settings.ini says to setuptools."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
config = ConfigParser(delimiters=("=",), interpolation=None)
config.read(root / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

extras = {
    name: settings[f"{name}_requirements"].split()
    for name in ("notebooks", "harness", "gguf", "onnx", "privacy", "ray", "signing", "dev")
}
for name in ("notebooks", "harness", "onnx", "privacy", "ray", "signing"):
    extras["dev"] += extras[name]
first, last = (int(settings[key].split(".")[1]) for key in ("min_python", "max_tested_python"))

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    license_expression=settings["license"],
    license_files=["LICENSE", "NOTICE"],
    keywords=[keyword.strip() for keyword in settings["keywords"].split(",")],
    project_urls={"Repository": settings["git_url"], "Documentation": settings["doc_url"]},
    classifiers=[
        f"Development Status :: {settings['status']}",
        "Intended Audience :: Science/Research",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(first, last + 1)),
    ],
    python_requires=f">={settings['min_python']}",
    packages=find_packages(include=["harmomoe", "harmomoe.*"]),
    package_data={"harmomoe": ["assets/**"]},
    include_package_data=False,
    install_requires=settings["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": ["harmomoe-serve = harmomoe.exchange.serve:main"],
        "nbdev": ["harmomoe = harmomoe._modidx:d"],
    },
)
