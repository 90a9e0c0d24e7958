"""Package for colcon; the version is that of package.xml."""

from glob import glob
from xml.etree import ElementTree

from setuptools import setup

NAME = "legato_ros"
MANIFEST = ElementTree.parse("package.xml").getroot()

setup(
    name=NAME,
    version=MANIFEST.findtext("version"),
    description=MANIFEST.findtext("description"),
    license=MANIFEST.findtext("license"),
    maintainer=MANIFEST.findtext("maintainer"),
    maintainer_email="legato@users.noreply.github.com",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.yaml")),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    entry_points={"console_scripts": [f"legato_node = {NAME}.node:main"]},
)
